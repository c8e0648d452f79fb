"""Values that packages hand to each other: frozen, validated, saved as JSON. Imports no torch."""
