"""The tests of the contract, one module for each noun."""
