"""A trainer that publishes through a publisher process until somebody kills it. argv[1]: publisher.yaml."""

import itertools
import sys

from publisher.publisher import Publisher
from tests.publisher.zoo import Zoo, adamw, train


def main() -> None:
    model = Zoo()
    optimizer = adamw(model)
    publisher = Publisher.attach(optimizer, model, sys.argv[1])
    print(publisher.version, flush=True)
    for step in itertools.count(1):
        train(model, optimizer, step)
        commit = publisher.publish(step).result()
        assert commit is not None
        print(commit.version, flush=True)


if __name__ == "__main__":
    main()
