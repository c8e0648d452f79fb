"""Other people's formats: Hugging Face directories, a person's own model."""
