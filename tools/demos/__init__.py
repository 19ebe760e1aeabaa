"""The demonstration: a race of wirings, a killed rank, a resumed batch."""
