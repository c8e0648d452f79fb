"""Records -> what a person sees."""
