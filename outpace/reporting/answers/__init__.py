"""Results as a verdict, tables and notes, the same in a terminal and in a document."""
