"""Formats of other projects: Hugging Face directories, custom models, plans for other trainers."""
