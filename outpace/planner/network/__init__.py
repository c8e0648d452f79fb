"""Network bandwidth that strategies need."""
