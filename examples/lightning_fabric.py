"""Your own loop with Lightning Fabric in FP8: `python examples/lightning_fabric.py` (needs lightning).

For the Trainer: `lightning.Trainer(plugins=[octavo.integrations.lightning.Fp8Precision("fp8")])`. Trains on the digits
of scikit-learn if it is installed.
"""

import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import octavo
from octavo.integrations.lightning import FabricFp8Precision

try:
    from sklearn.datasets import load_digits

    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16  # 1797 images of 8 × 8 pixels
except ModuleNotFoundError:
    print("scikit-learn is not installed: random images, labeled by their brightest row")
    images = torch.rand(1797, 64, generator=torch.Generator().manual_seed(0))
    labels = images.view(-1, 8, 8).sum(2).argmax(1)

plugin = FabricFp8Precision("fp8+activations+optimizer")
fabric = lightning.Fabric(accelerator="auto", devices=1, plugins=[plugin])
fabric.seed_everything(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = octavo.AdamW(model.parameters(), lr=1e-3)  # moments in FP8
model, optimizer = fabric.setup(model, optimizer)  # converts the model
data = TensorDataset(images[:1500], labels[:1500])
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=50, shuffle=True))
for epoch in range(4):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}  loss {loss.item():.3f}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "checkpoint.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "fp8": plugin.state_dict()})
    rest = fabric.load(path, {"model": model, "optimizer": optimizer})
    plugin.load_state_dict(rest["fp8"])  # recipes and their state
print(octavo.report(model.module).summary)
with torch.no_grad():
    correct = model(fabric.to_device(images[1500:])).argmax(1).cpu() == labels[1500:]
print(f"accuracy on 297 images that it did not see: {correct.float().mean():.1%}")
