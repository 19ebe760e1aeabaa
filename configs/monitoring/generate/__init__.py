"""What makes the dashboards: their panels and queries as data, from the catalogue of metrics."""
