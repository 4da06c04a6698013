"""The configuration of a run: TOML in, frozen pydantic models out."""
