"""Terminal output, errors for missing packages, and compatibility between torch releases."""
