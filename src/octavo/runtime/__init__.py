"""Terminal output, and compatibility between torch releases."""
