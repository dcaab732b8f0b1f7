"""The rule-based scorers that launch scripts of radixark Miles and slime name with --rm-type."""
