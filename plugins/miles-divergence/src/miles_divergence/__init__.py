"""The first tensor at which two trainers, layouts or precisions differ beyond rounding."""
