import click


@click.command()
@click.option("--learning-rate", type=float, default=0.1)
def main(learning_rate):
    print(learning_rate)


main()
