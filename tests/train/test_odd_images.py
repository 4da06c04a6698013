"""Odd image files, folders and records: each is read as meant, or is an error that names it."""

import json

import numpy as np
import pytest
import torch
from test_image_text import LLAVA, SIZES, VISION, record, tables
from tiny_runs import Recorder

from octavo.train import ConfigError, parse_config, run
from octavo.train.data.images import ImageFiles, ImageShape, LatentFiles, hash_files, split
from octavo.train.record.progress import NullProgress
from octavo.train.tasks.images import ImageTextTask
from octavo.train.tasks.registry import task_of

pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

SHAPE = ImageShape(1, 8, 8)


def decoded(path, shape=SHAPE):
    pixels = ImageFiles([path], hash_files([path]), shape).pixels([0])[0]
    return pixels


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits_keep_their_range(suffix, tmp_path):
    grey = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(grey).save(path)
    expected = torch.from_numpy((grey >> 8).astype(np.float32)) / 127.5 - 1
    torch.testing.assert_close(decoded(path)[0], expected)
    torch.testing.assert_close(decoded(path, ImageShape(3, 8, 8)), expected.expand(3, 8, 8))


def test_images_are_turned_as_their_exif_asks(tmp_path):
    upright = np.repeat(np.arange(8, dtype=np.uint8) * 30, 8).reshape(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # a viewer turns it a quarter clockwise
    Image.fromarray(np.rot90(upright).copy()).save(tmp_path / "a.png", exif=exif)
    expected = torch.from_numpy(upright.astype(np.float32)) / 127.5 - 1
    torch.testing.assert_close(decoded(tmp_path / "a.png")[0], expected)


def test_modes_and_shapes(tmp_path):
    """Transparency is dropped, of an animation the first frame counts; none of it warns."""
    colours = Image.new("RGB", (4, 4), (255, 0, 0))
    palette = colours.convert("P")
    palette.save(tmp_path / "palette.png", transparency=bytes(range(256)))
    colours.convert("CMYK").save(tmp_path / "cmyk.tif")
    colours.convert("RGBA").save(tmp_path / "alpha.png")
    colours.save(tmp_path / "frames.gif", save_all=True, append_images=[Image.new("RGB", (4, 4), (0, 255, 0))])
    colours.resize((1, 1)).save(tmp_path / "one.png")
    colours.resize((1, 5000)).save(tmp_path / "tall.png")
    for path in tmp_path.iterdir():
        red = torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 8, 8)
        torch.testing.assert_close(decoded(path, ImageShape(3, 8, 8)), red, msg=path.name)


def folder_of(base, names):
    for number, name in enumerate(names):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(base / name, format="PNG")
    settings = tables(model={"type": "vit", "config": {**SIZES, "patch_size": 4, "image_size": 8, "num_channels": 1}})
    settings["data"] = {"task": "image-classification", "source": str(base)}
    settings["optim"] = {"lr": 1e-2, "batch": 2}
    settings["run"] = {"steps": 1, "device": "cpu"}
    return parse_config(settings)


def load(config, progress=None):
    data = task_of(config).load(config, progress or NullProgress())
    return data


TWO = [f"{name}/{number}.png" for name in "ab" for number in range(4)]


def test_files_that_are_no_images_of_a_class(tmp_path):
    config, seen = folder_of(tmp_path, [*TWO, "0.png", "b/notes.txt", "__MACOSX/0.png", ".git/0.png"]), Recorder()
    (tmp_path / "a" / "._0.png").write_bytes(b"a resource fork")
    data = load(config, seen)
    assert data.names == ("a", "b") and len(data.training) + len(data.held_out) == 8
    assert seen.notes == [f"2 of 10 files in {tmp_path} are left out: 1 .png, 1 .txt"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([*TWO, "a/more/9.png"], r"a/more/9.png is not in the folder of a class but further below"),
        (["train/a/0.png", "train/b/0.png", "test/a/0.png"], "test/a/0.png is not in the folder of a class"),
        ([*TWO[:4], "b/0.png", "c/0.png"], 'no image is left to train on of the class "b"'),
    ],
)
def test_folders_that_would_be_read_otherwise_than_meant(names, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load(folder_of(tmp_path, names))


def test_the_class_that_changed_before_a_resume_is_named(tmp_path):
    config = folder_of(tmp_path / "images", TWO)
    run(config, out=tmp_path / "out")
    (tmp_path / "images" / "b").rename(tmp_path / "images" / "c")  # the order of classes stays
    with pytest.raises(ConfigError, match='images has now: class "b": then 4 examples, digest .*, now not there'):
        run(config, out=tmp_path / "out", resume=True)
    (tmp_path / "images" / "c").rename(tmp_path / "images" / "b")
    Image.new("L", (8, 8), 99).save(tmp_path / "images" / "b" / "new.png")
    with pytest.raises(ConfigError, match='other data than .*images has now: class "b": then 4 examples, .*now 5'):
        run(config, out=tmp_path / "out", resume=True)


@pytest.mark.parametrize("kind", ["image", "latent"])
def test_a_file_that_changes_during_a_run(kind, tmp_path):
    path = tmp_path / "a.png"
    Image.new("L", (8, 8), 1).save(path)
    if kind == "latent":
        path = tmp_path / "a.npy"
        np.save(path, np.zeros((1, 8, 8), np.float32))
    data = (ImageFiles if kind == "image" else LatentFiles)([path], hash_files([path]), SHAPE)
    data.pixels([0])
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ConfigError, match=rf"a\.{path.suffix[1:]} changed after the run began"):
        data.pixels([0])
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        data.pixels([0])


def test_examples_of_one_image_are_on_the_same_side():
    training, held_out = split("abcdeaedcbffgghhiijj")
    assert [*map("abcdeaedcbffgghhiijj".__getitem__, held_out)] == ["e", "e", "j", "j"]
    assert sorted(training + held_out) == list(range(20))
    assert split(range(12)) == ([0, 1, 2, 3, 5, 6, 7, 8, 10, 11], [4, 9])


def image_text(folder, records, **changes):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate("abcdef"):
        Image.new("L", (8, 8), 40 * number).save(folder / f"{name}.png")
    (folder / "data.json").write_text(json.dumps(records), encoding="utf-8-sig")
    data = {"source": str(folder / "data.json"), "sequence_length": 40}
    config = parse_config(tables(data=data, optim={"batch": 1}, model={"config": LLAVA | VISION | changes}))
    return ImageTextTask.load(config, NullProgress())


def test_records_of_one_image_are_on_the_same_side(tmp_path):
    records = [record(image=f"{name}.png") for name in "aabbccddeeff"]
    data = image_text(tmp_path, records)
    sides = [{image // 2 for image in part} for part in (data._image_of[: data.training], data._image_of[-2:])]
    assert sides == [{0, 1, 2, 3, 5}, {4}] and data.held_out == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (record(image="../secret.png"), r'record 1 of data.json: "image" is \'../secret.png\', outside of'),
        (record(image="/etc/logo.png"), "outside of .* set data.images"),
        (record(image="a\0.png"), r"the image .*a\\x00.png' cannot be read: embedded null byte"),
        (record(image="\ud800.png"), 'record 1 .*"image" is not valid Unicode'),
        (
            record(conversations=[{"from": "human", "value": "<image>\ud800"}, {"from": "gpt", "value": "x"}]),
            '"value" is not valid',
        ),
    ],
)  # fmt: skip
def test_paths_and_texts_of_records(bad, message, tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "secret.png")
    with pytest.raises(ConfigError, match=message):
        image_text(tmp_path / "data", [record(), bad])


def test_a_file_that_is_nested_too_deeply(tmp_path):
    image_text(tmp_path, [record()])
    (tmp_path / "data.json").write_text("[" * 100_000)
    config = parse_config(tables(data={"source": str(tmp_path / "data.json")}, model={"config": LLAVA | VISION}))
    with pytest.raises(ConfigError, match="nested too deeply"):
        ImageTextTask.load(config, NullProgress())


def test_a_placeholder_that_text_has_too(tmp_path):
    """The features would replace embeddings of text."""
    with pytest.raises(ConfigError, match="record 0 of data.json has the token 65 .* placeholder of images"):
        image_text(tmp_path, [record()], image_token_index=65)
