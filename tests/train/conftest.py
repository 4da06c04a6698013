from run_fixtures import *  # noqa: F403
