"""Space: nodes, devices and links, where ranks go, groups, collectives and what they cost. The lowest layer."""
