"""Opacus: per-example gradients from hooks ("plain"), and ghost clipping."""

import measuring
import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODES = ("ghost", "plain")


def build(model):
    """The plain model, for inputs in PyTorch's order: channels before rows and columns."""
    if model == "mlp":
        return nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),  # Keras's "same" for 28×28
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def main():
    args = measuring.parse_arguments(MODES)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (torch.ones([8, 8], device=device) @ torch.ones([8, 8], device=device)).sum().item()

    def train(lots, steps):
        x, y = (torch.from_numpy(array) for array in lots)
        if x.ndim == 5:
            x = x.movedim(-1, 2).contiguous()
        model = build(args.model).to(device)
        # Tells the engine the sizes; the lots are cut already, which is faster than the loader.
        loader = DataLoader(TensorDataset(x.flatten(0, 1), y.flatten()), args.lot_size)
        private, optimizer, *rest = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), measuring.LEARNING_RATE),
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=measuring.NOISE_MULTIPLIER,
            max_grad_norm=measuring.L2_NORM_CLIP,
            poisson_sampling=False,
            grad_sample_mode={"ghost": "ghost", "plain": "hooks"}[args.mode],
        )
        loss = rest[0] if args.mode == "ghost" else nn.CrossEntropyLoss()

        def step(x, y):
            optimizer.zero_grad()
            value = loss(private(x.to(device)), y.to(device))
            value.backward()
            optimizer.step()
            value.item()  # waits, as Keras does

        return measuring.run_steps(step, (x, y), steps)

    measuring.measure(args, train, ("torch", "opacus"))


if __name__ == "__main__":
    main()
