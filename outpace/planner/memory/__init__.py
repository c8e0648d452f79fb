"""Peak memory of every plan of a batch, in closed form."""
