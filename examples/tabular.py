# /// script
# dependencies = ["numba==0.68.1", "numpy==2.2.6", "scipy==1.17.1", "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "minigrid==3.2.0", "minatar==1.0.15", "tyro==1.0.17", "cloudpickle==3.1.3", "tensorboard==2.21.0", "imageio-ffmpeg==0.8.1"]  # noqa: E501
# ///
"""Graph Backup without a network: a complete tabular agent on FrozenLake.

python examples/tabular.py
"""

import sys
from pathlib import Path

import gymnasium
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # gbcore, if it is not installed

from gbcore import TransitionGraph, q_targets

env = gymnasium.make("FrozenLake-v1", is_slippery=False)
graph = TransitionGraph(num_actions=4, obs_shape=(1,), obs_dtype=np.int64)
q, pairs, rng = np.zeros((16, 4)), [], np.random.default_rng(0)
for episode in range(200):
    obs, _ = env.reset(seed=episode)
    node, over = graph.node(np.array([obs])), False
    while not over:
        action = int(rng.integers(4))
        obs, reward, terminated, truncated, _ = env.step(action)
        next_node = graph.node(np.array([obs]))
        graph.add(node, action, float(reward), next_node, terminated)
        pairs.append((node, action))
        node, over = next_node, terminated or truncated
    nodes, actions = np.array(pairs)[rng.integers(len(pairs), size=32)].T
    subgraphs = graph.expand(nodes, actions, depth=5, breadth=20, rng=rng)
    targets = q_targets(subgraphs, q[subgraphs.nodes], gamma=0.95)
    q[nodes, actions] = targets
start = graph.find(np.array([0]))
print(f"value of the start: {q[start].max():.3f}; the shortest path gives {0.95**5:.3f}")
