"""What several tests share: ranks to start, models, backends, environments, and what the ranks run."""
