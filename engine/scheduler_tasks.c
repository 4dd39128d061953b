/* SPDX-License-Identifier: Apache-2.0
 *
 * Tasks and choices from their arrival to their end, and the queue between.
 */
#include "engine/scheduler_internal.h"

#include "engine/clock.h"

/* ---- the waiting queue ---- */

void scheduler_queue_remove(struct scheduler *s, struct choice *choice) {
    *(choice->previous ? &choice->previous->next : &s->waiting_first) = choice->next;
    *(choice->next ? &choice->next->previous : &s->waiting_last) = choice->previous;
    choice->next = choice->previous = NULL;
    s->waiting_count--;
}

void scheduler_queue_back(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_WAITING;
    choice->previous = s->waiting_last;
    choice->next = NULL;
    *(s->waiting_last ? &s->waiting_last->next : &s->waiting_first) = choice;
    s->waiting_last = choice;
    s->waiting_count++;
}

void scheduler_queue_front(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_WAITING;
    choice->next = s->waiting_first;
    choice->previous = NULL;
    *(s->waiting_first ? &s->waiting_first->previous : &s->waiting_last) = choice;
    s->waiting_first = choice;
    s->waiting_count++;
}

/* ---- life of tasks and choices ---- */

void scheduler_add_output(struct scheduler *s, struct output_node *node) {
    if (node == NULL)
        return;
    *s->made_tail = node;
    s->made_tail = &node->next;
}

void scheduler_mark_started(struct scheduler *s, struct task *task, double now) {
    if (task->started)
        return;
    task->started = true;
    task->started_s = now;
    pthread_mutex_lock(&s->mutex);
    s->requests_waiting--;
    pthread_mutex_unlock(&s->mutex);
}

static void task_unlink(struct scheduler *s, struct task *task) {
    *(task->previous ? &task->previous->next : &s->tasks) = task->next;
    if (task->next != NULL)
        task->next->previous = task->previous;
}

void scheduler_finish_choice(
    struct scheduler *s, struct choice *choice, enum finish_reason finish, const struct error *error, double now) {
    struct task *task = choice->task;
    if (choice->state == CHOICE_WAITING)
        scheduler_queue_remove(s, choice);
    choice->state = CHOICE_FINISHED;
    scheduler_drop_sequence(s, choice);
    struct output_node *node = choice_make_last_output(choice, finish, error, now);
    if (--task->unfinished == 0) {
        node->output.last = true;
        scheduler_mark_started(s, task, now);
        task_unlink(s, task);
        task->next = s->finished;
        s->finished = task;
    }
    scheduler_add_output(s, node);
}

void scheduler_sweep_running(struct scheduler *s) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->running_count; i++)
        if (s->running[i]->state == CHOICE_RUNNING)
            s->running[kept++] = s->running[i];
    s->running_count = kept;
}

void scheduler_free_finished(struct scheduler *s) {
    while (s->finished != NULL) {
        struct task *task = s->finished;
        s->finished = task->next;
        task_free(task);
    }
}

void scheduler_finish_task(
    struct scheduler *s, struct task *task, enum finish_reason finish, const struct error *error) {
    double now = clock_seconds();
    for (uint32_t i = 0; i < task->choices_count; i++)
        if (task->choices[i].state != CHOICE_FINISHED)
            scheduler_finish_choice(s, &task->choices[i], finish, error, now);
    scheduler_sweep_running(s);
}

void scheduler_finish_prompt(struct scheduler *s, struct choice *leader, double now) {
    uint32_t n = leader->task->request->n;
    for (uint32_t i = 0; i < n; i++)
        if (leader[i].state != CHOICE_FINISHED)
            scheduler_finish_choice(s, &leader[i], FINISH_LENGTH, NULL, now);
}

void scheduler_take_task(struct scheduler *s, struct task *task) {
    task->next = s->tasks;
    task->previous = NULL;
    if (s->tasks != NULL)
        s->tasks->previous = task;
    s->tasks = task;
    for (uint32_t i = 0; i < task->choices_count; i++)
        if (choice_is_leader(&task->choices[i]))
            scheduler_queue_back(s, &task->choices[i]);
}

/* The last choice's end frees nothing yet: tasks stay until scheduler_free_finished. */
static void expire_task(struct scheduler *s, struct task *task) {
    double now = clock_seconds();
    for (uint32_t i = 0; i < task->choices_count; i++) {
        struct choice *choice = &task->choices[i];
        if (choice->state != CHOICE_FINISHED)
            scheduler_finish_choice(
                s, choice, choice->generated.count > 0 ? FINISH_LENGTH : FINISH_CANCELLED, NULL, now);
    }
    scheduler_sweep_running(s);
}

void scheduler_cancel_task(struct scheduler *s, const struct request *request, bool expired) {
    for (struct task *task = s->tasks; task != NULL; task = task->next)
        if (task->request == request) {
            if (expired)
                expire_task(s, task);
            else
                scheduler_finish_task(s, task, FINISH_CANCELLED, NULL);
            return;
        }
}

void scheduler_cancel_all(struct scheduler *s) {
    while (s->tasks != NULL)
        scheduler_finish_task(s, s->tasks, FINISH_CANCELLED, NULL);
    scheduler_free_finished(s);
}
