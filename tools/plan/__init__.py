"""Whether a model fits and how fast it will be, by arithmetic; and simulators of a step and of a fleet."""
