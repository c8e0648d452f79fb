"""Stages and schedules of pipelines, and their simulation."""
