"""Sizes of the files of an export: what Transformers would misread is an error."""

import pytest

from octavo.serving.writer import check_shard_size


@pytest.mark.parametrize("size", ["50GB", "5 MB", "4GiB", "1.5gb", 10])
def test_sizes(size):
    check_shard_size(size)


@pytest.mark.parametrize("size", ["-5KB", "banana", "0", "0GB", "GB", 0, "5"])
def test_other_sizes_are_errors(size):
    with pytest.raises(ValueError, match='max_shard_size is a size such as "5GB"'):
        check_shard_size(size)
