"""Training: the job, its model and layout, its records and exports."""
