"""Stages and schedules of pipelines, and simulation of schedules."""
