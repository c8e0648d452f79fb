"""What is handed from room to room: frozen, validated, saved as JSON. Imports no torch."""
