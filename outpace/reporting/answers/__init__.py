"""Results as a verdict, tables and notes, for terminals and documents."""
