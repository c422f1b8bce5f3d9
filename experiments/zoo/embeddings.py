"""Tables of embeddings with rare and frequent rows: recommenders, knowledge graphs and words."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.zoo.task import Problem, fitted, generator, mlp, rows, task


def zipf(size: int) -> Tensor:
    """Return chances of so many rows, the first most frequent."""
    chances = 1 / torch.arange(5.0, size + 5)
    return chances / chances.sum()


def drawn(chances: Tensor, count: int, random: torch.Generator) -> Tensor:
    return torch.multinomial(chances, count, replacement=True, generator=random)


class Factors(nn.Module):
    """Users, items and their biases."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.biases = nn.Embedding(items, 1)
        for table in (self.users, self.items, self.biases):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.users(user) * self.items(item)).sum(dim=1) + self.biases(item).squeeze(1)


@task(lr=1e-2, steps=1200)
def matrix_factorisation(seed: int) -> Problem:
    """Ratings by 2,000 users of 1,000 items (Zipf) are factored with 16 numbers each, batches of 1,024."""
    random = generator(seed)
    user, item = torch.randn(2000, 8, generator=random), torch.randn(1000, 8, generator=random)
    biases, frequent = torch.randn(1000, generator=random), (zipf(2000), zipf(1000))
    model = Factors(2000, 1000, 16)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        u, i = (drawn(chances, 1024, random) for chances in frequent)
        noise = 0.3 * torch.randn(1024, generator=random)
        return u, i, (user[u] * item[i]).sum(dim=1) / 8**0.5 + biases[i] + noise

    return fitted(model, lambda u, i, rating: F.mse_loss(model(u, i), rating), draw, seed)


class TwoTower(nn.Module):
    """A tower for users' histories and one for items."""

    def __init__(self, items: int, width: int) -> None:
        super().__init__()
        self.history, self.items = nn.Embedding(items, width), nn.Embedding(items, width)
        self.left, self.right = mlp(width, 64, 32), mlp(width, 64, 32)

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        left = F.normalize(self.left(self.history(history).mean(dim=1)), dim=1)
        return 10 * left @ F.normalize(self.right(self.items(item)), dim=1).T


@task(lr=1e-2, steps=600)
def two_tower(seed: int) -> Problem:
    """Two towers on tables of 3,000 items match histories to next items, in-batch softmax of 256."""
    random = generator(seed)
    topic = torch.randint(40, (3000,), generator=random)
    by_topic = [torch.nonzero(topic == t).squeeze(1) for t in range(40)]
    popular = [zipf(len(members)) for members in by_topic]
    model = TwoTower(3000, 32)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        topics = torch.randint(40, (32,), generator=random).tolist()
        sessions = torch.cat([by_topic[t][drawn(popular[t], 72, random)].view(8, 9) for t in topics])
        return sessions[:, :8], sessions[:, 8]

    return fitted(model, lambda h, i: F.cross_entropy(model(h, i), torch.arange(len(i))), draw, seed)


class ClickModel(nn.Module):
    """Hashed embeddings of fields, their products, and a network on both."""

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, width), nn.Embedding(rows, 1)
        nn.init.normal_(self.table.weight, std=0.05)
        nn.init.zeros_(self.linear.weight)
        self.net = mlp(fields * width, 64, 32, 1)

    def forward(self, hashed: Tensor) -> Tensor:
        found = self.table(hashed)
        pairs = (found.sum(dim=1) ** 2 - (found**2).sum(dim=1)).sum(dim=1) / 2
        return self.net(found.flatten(1)).squeeze(1) + pairs + self.linear(hashed).sum(dim=(1, 2))


@task(lr=1e-3, steps=450)
def click_through(seed: int) -> Problem:
    """Clicks from 8 fields of 2,000 values (Zipf), hashed to 4,096 rows of 8 numbers; batches of 1,024."""
    random = generator(seed)
    hidden, chances = torch.randn(8, 2000, 4, generator=random), zipf(2000)
    lone = torch.randn(8, 2000, generator=random)
    model = ClickModel(8, 4096, 8)
    field = torch.arange(8)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        values = drawn(chances, 1024 * 8, random).view(1024, 8)
        found = hidden[field, values]
        score = (found[:, :4].sum(1) * found[:, 4:].sum(1)).sum(1) / 8 + lone[field, values].sum(1) / 2 - 1.5
        clicks = (torch.rand(1024, generator=random) < score.sigmoid()).float()
        return (values * 31 + field * 7919 + values * values * 17) % 4096, clicks

    return fitted(model, lambda x, y: F.binary_cross_entropy_with_logits(model(x), y), draw, seed)


class TransE(nn.Module):
    """Entities and relations as vectors, head + relation = tail (Bordes et al. 2013)."""

    def __init__(self, entities: int, relations: int, width: int) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, width), nn.Embedding(relations, width)
        for table in (self.entities, self.relations):
            nn.init.uniform_(table.weight, -6 / width**0.5, 6 / width**0.5)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        start = F.normalize(self.entities(head), dim=-1) + self.relations(relation)
        return (start - F.normalize(self.entities(tail), dim=-1)).norm(dim=-1)


@task(lr=1e-2, steps=700)
def knowledge_graph(seed: int) -> Problem:
    """TransE with 32 numbers for 2,000 entities and 12 relations, margin loss, batches of 512."""
    random = generator(seed)
    place, way = torch.randn(2000, 6, generator=random), torch.randn(12, 6, generator=random)
    tails = torch.stack([torch.cdist(place + step, place).topk(3, largest=False).indices for step in way], 1)
    model, chances = TransE(2000, 12, 32), zipf(2000)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        head, wrong = drawn(chances, 512, random), torch.randint(2000, (512,), generator=random)
        relation, which = torch.randint(12, (512,), generator=random), torch.randint(3, (512,), generator=random)
        return head, relation, tails[head, relation, which], wrong

    def loss(head: Tensor, relation: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
        return F.relu(1 + model(head, relation, tail) - model(head, relation, wrong)).mean()

    return fitted(model, loss, draw, seed)


@task(lr=1e-2, steps=400)
def bag_classifier(seed: int) -> Problem:
    """An EmbeddingBag of 5,000 words x 64 with a linear layer classifies texts of 30 words, batches of 128."""
    random = generator(seed)
    topics = torch.rand(20, 5000, generator=random).pow(8) * zipf(5000)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(5000, 64), nn.Linear(64, 20)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.words(words))

    model = Bag()

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        topic = torch.randint(20, (128,), generator=random)
        noise = drawn(zipf(5000), 128 * 15, random).view(128, 15)
        words = torch.multinomial(topics[topic], 15, replacement=True, generator=random)
        return torch.cat([words, noise], dim=1), topic

    return fitted(model, lambda x, y: F.cross_entropy(model(x), y), draw, seed)


@cache
def words() -> tuple[Tensor, int]:
    """Return Python's own documentation as numbers of words, the frequent first, and how many words there are."""
    from pydoc_data.topics import topics

    text = re.findall(r"[a-z_]+", "\n".join(topics[key] for key in sorted(topics)).lower())
    known = {word: i for i, (word, _) in enumerate(Counter(text).most_common(3000))}
    return torch.tensor([known[word] for word in text if word in known]), len(known)


@task(lr=3e-3, steps=450)
def skip_gram(seed: int) -> Problem:
    """Skip-gram with 5 negatives and 64 numbers for 3,000 words of Python's docs, batches of 512."""
    text, size = words()
    near, wide = nn.Embedding(size, 64), nn.Embedding(size, 64)
    nn.init.uniform_(near.weight, -1 / 128, 1 / 128)
    nn.init.zeros_(wide.weight)
    chances = torch.bincount(text, minlength=size).float().pow(0.75)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        at = torch.randint(4, len(text) - 4, (512,), generator=random)
        by = torch.tensor([-4, -3, -2, -1, 1, 2, 3, 4])[torch.randint(8, (512,), generator=random)]
        return text[at], text[at + by], drawn(chances, 512 * 5, random).view(512, 5)

    def loss(word: Tensor, other: Tensor, wrong: Tensor) -> Tensor:
        hidden = near(word)
        right = F.logsigmoid((hidden * wide(other)).sum(dim=1))
        return -(right + F.logsigmoid(-(wide(wrong) @ hidden[:, :, None]).squeeze(2)).sum(dim=1)).mean()

    return fitted(nn.ModuleDict({"near": near, "wide": wide}), loss, draw, seed)


@task(lr=9e-3, steps=300, schedule="one-cycle")
def session_gru(seed: int) -> Problem:
    """A GRU over embeddings of 1,000 items predicts the next of a session, batches of 32 x 12."""
    random = generator(seed)
    follow = torch.stack([torch.randint(1000, (4,), generator=random) for _ in range(1000)])
    sessions = [drawn(zipf(1000), 4000, random)]
    for _ in range(12):
        sessions.append(follow[sessions[-1], torch.randint(4, (4000,), generator=random)])
    data = torch.stack(sessions, dim=1)

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.head = nn.Embedding(1000, 48), nn.Linear(64, 1000)
            self.gru = nn.GRU(48, 64, batch_first=True)

        def forward(self, items: Tensor) -> Tensor:
            return self.head(self.gru(self.items(items))[0])

    model = Recommender()
    draw = rows(data[:3600], size=32)
    return fitted(
        model,
        lambda x: F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()),
        draw,
        seed,
        test=(data[3600:],),
    )
