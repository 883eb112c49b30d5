"""Fit a forest on a table and dump it with joblib, in the shape of SageMaker's scikit-learn scripts."""

import argparse
import os

import joblib
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--n-estimators", type=int, default=10)
    parser.add_argument("--max-leaf-nodes", type=int, default=-1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model-dir", type=str, default=os.environ.get("SM_MODEL_DIR"))
    args = parser.parse_args()

    features, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(features, labels, random_state=0)
    model = RandomForestClassifier(
        n_estimators=0,
        max_leaf_nodes=args.max_leaf_nodes,
        random_state=0,
        warm_start=True,
    )
    for round in range(1, args.rounds + 1):
        model.n_estimators += args.n_estimators
        model.fit(train_x, train_y)
        print(f"round {round}: trees={model.n_estimators} accuracy={model.score(test_x, test_y):.6f}", flush=True)
    joblib.dump(model, os.path.join(args.model_dir, "model.joblib"))
    print("model saved")
