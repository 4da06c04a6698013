"""Level 8: runs compared with each other: the demo, `octavo compare`, verdicts, reports and charts."""
