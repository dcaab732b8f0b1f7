"""Figures of a Miles run for Prometheus, and its stages as OpenTelemetry spans."""
