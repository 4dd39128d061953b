/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/train.h"

#include <jansson.h>
#include <math.h>

static void set_real(json_t *object, const char *name, double value) {
    if (isfinite(value))
        json_object_set_new(object, name, json_real(value));
}

json_t *train_event_json(const struct train_event *event) {
    json_t *object = json_object();
    json_object_set_new(object, "step", json_integer((json_int_t)event->step));
    json_object_set_new(object, "steps", json_integer((json_int_t)event->steps));
    if (event->stage != NULL)
        json_object_set_new(object, "stage", json_string(event->stage));
    set_real(object, "loss", event->loss);
    set_real(object, "reward", event->reward);
    set_real(object, "entropy", event->entropy);
    set_real(object, "gradient_norm", event->gradient_norm);
    set_real(object, "learning_rate", event->learning_rate);
    set_real(object, "kl_valid", event->kl_valid);
    set_real(object, "kl_valid_relative", event->kl_valid_relative);
    set_real(object, "tokens_per_second", event->tokens_per_second);
    set_real(object, "seconds", event->seconds);
    set_real(object, "seconds_left", event->seconds_left);
    json_object_set_new(object, "tokens", json_integer((json_int_t)event->tokens));
    return object;
}
