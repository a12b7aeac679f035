"""Reports a step's memory by kind, from a run, or from a run without data for a device that is not there."""
