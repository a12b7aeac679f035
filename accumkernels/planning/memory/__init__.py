"""What it takes: bytes by kind, of a step that is run, or run without data for a device that is not there."""
