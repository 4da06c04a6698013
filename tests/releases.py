"""What a test needs of the torch release that it runs on."""

import pytest
import torch
from packaging.version import Version


def requires_torch(release, why):
    """Skips a test on older releases, with the reason."""
    return pytest.mark.skipif(Version(torch.__version__) < Version(release), reason=f"needs torch {release}: {why}")
