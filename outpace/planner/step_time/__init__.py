"""Step time of every plan of a batch, in closed form."""
