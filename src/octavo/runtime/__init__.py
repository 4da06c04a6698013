"""What the rest of the package needs from the process that it runs in, and from the torch release that is installed."""
