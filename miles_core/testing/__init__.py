"""What plugin authors test with: a clock of one's own, and parts that stand in for an engine and a trainer."""
