"""What a run leaves in its folder: metrics, events, statistics, one JSON object a line."""
