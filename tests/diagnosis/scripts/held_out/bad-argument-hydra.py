import hydra


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    print(config)


main()
