"""The client library sends no parameter that the router's native routes do not have."""

from text_generation.types import Parameters
from text_generation_router.api.tgi.schemas import GenerateParameters


def test_every_parameter_of_the_client_is_one_of_the_router() -> None:
    assert set(Parameters.model_fields) <= set(GenerateParameters.model_fields)
