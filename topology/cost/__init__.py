"""What a message takes: prices of links, fits and tuning."""
