"""Which parameters of a Miles run train, and at which learning rate."""
