import model
