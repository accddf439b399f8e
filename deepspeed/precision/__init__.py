"""Number formats: loss scaling and the choice of dtypes."""
