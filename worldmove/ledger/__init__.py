"""The durable record of who owns which session at which epoch."""
