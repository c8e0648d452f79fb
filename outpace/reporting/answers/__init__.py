"""Results as a verdict, tables and notes, for a terminal and for a document."""
