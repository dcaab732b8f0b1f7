"""Scorers for mathematical answers: "math", "boxed_math" and "format"."""
