"""Interfaces to other projects: Hugging Face models, custom models, plans for other trainers."""
