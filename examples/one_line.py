"""The one line in a training loop of your own: `python examples/one_line.py` (needs torch and octavo only)."""

import torch
from torch import nn

import octavo

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
model.to(device, torch.bfloat16)

octavo.convert(model)  # this is it; the optimizer, the loop and the checkpoints stay what they are
print(octavo.report(model))

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
target = nn.Linear(64, 64).to(device, torch.bfloat16)
for step in range(101):
    x = torch.randn(512, 64, device=device, dtype=torch.bfloat16)
    loss = nn.functional.mse_loss(model(x), target(x).detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

with octavo.disabled():  # high-precision evaluation of the same weights
    x = torch.randn(4096, 64, device=device, dtype=torch.bfloat16)
    print(f"evaluated in bf16: {nn.functional.mse_loss(model(x), target(x)).item():.4f}")
