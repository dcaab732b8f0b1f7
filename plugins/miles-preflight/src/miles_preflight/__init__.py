"""What a plan asks of data, chat template, checkpoint files and machine before a run starts."""
