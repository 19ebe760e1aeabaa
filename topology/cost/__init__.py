"""The cost of a message: prices of links, fits and tuning."""
